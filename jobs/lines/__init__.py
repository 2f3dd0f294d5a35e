"""What a line of a request file may say, and how it is read and written."""
