"""What a schedule says, and when it runs."""
