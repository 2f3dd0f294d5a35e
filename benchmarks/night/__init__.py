"""A night of many GPU workers, without GPUs: what it does to the database and the broker."""
