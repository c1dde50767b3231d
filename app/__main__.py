"""`python -m app`: the same as `tpukv`."""

from app.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
