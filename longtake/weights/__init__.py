"""Weight files: safetensors read when asked for, and one file for each kind of model that maps its names to ours."""
