"""The named schedules: each file one of them, a row for every rank."""
