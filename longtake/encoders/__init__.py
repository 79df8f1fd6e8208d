"""Video autoencoders (pixels <-> latents) and text encoders (captions -> embeddings).

An `Autoencoder` maps pixels to a posterior of latents and back; a text encoder has `embed` (to token sequences or one
pooled vector each), `mask`, `dim` and `max_length`. Learned ones consist of nn.Modules, whose weights the system reads.
"""
