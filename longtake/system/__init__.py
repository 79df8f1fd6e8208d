"""Model of a run: denoiser, encoders and objective, built from the config and placed on the mesh."""
