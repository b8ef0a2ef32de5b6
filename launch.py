"""Entry point: `python launch.py [verb] [overrides]` is the same command as the
installed `mtrain`.
"""

from mtrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
