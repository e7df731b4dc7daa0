"""`python -m jaxpar.pp`: shows, checks, compares and saves pipeline schedules."""

from jaxpar.pp._schedule._command import main

if __name__ == "__main__":
    raise SystemExit(main())
