"""The tests, by kind: unit, integration, acceptance, migration, parity."""
