"""What a run is made of: denoiser, encoders and objective put together from the config and placed on the mesh."""
