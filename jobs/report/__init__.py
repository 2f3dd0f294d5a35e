"""Reports of jobs as one HTML file that needs nothing else."""
