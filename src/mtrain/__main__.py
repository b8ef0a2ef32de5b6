"""`python -m mtrain` is the same command as `mtrain`, for systems without scripts on PATH."""

from mtrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
