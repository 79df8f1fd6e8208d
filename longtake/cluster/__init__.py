"""A run on many machines: started over ssh, watched, and ended together; or handed to Slurm."""
