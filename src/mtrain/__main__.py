"""`python -m mtrain` is the same command as `mtrain`."""

from mtrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
