"""The process that runs task files for a deployment: reads rows, and writes answers."""
