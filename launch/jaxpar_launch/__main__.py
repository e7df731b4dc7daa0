"""`python -m jaxpar_launch` is `jaxpar-launch`."""

from jaxpar_launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
