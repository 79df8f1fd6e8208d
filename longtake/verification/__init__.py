"""Verification of released weights on a user's machine: against the libraries' own models, in training, against the
plan. `release` finds the files, `parts` compares, `training` trains, `run` puts a report together, `report` writes it.
"""
