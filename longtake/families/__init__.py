"""Model families, one file each: which sections, encoders, laws, files and quirks belong to a denoiser.

Everything above asks for `family_of(config.model)` and names none. A new family is one file here beside its model,
its weight table and, where they are new, its autoencoder and objective; `register` makes it known, from outside too.
"""
