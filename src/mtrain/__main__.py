"""`python -m mtrain` is the same command as `mtrain`, where scripts of an installation are not on
PATH.
"""

from mtrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
