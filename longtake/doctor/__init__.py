"""Why a model makes noise, or a run is slow: checks of its data, encoders, weights and training, causes ranked."""
