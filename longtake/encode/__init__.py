"""Latents and text embeddings ahead of time: what to encode (`plan`), the work (`run`), whether a store
fits a run (`fit`) and is undamaged (`verify`), and whether a run makes one first (`auto`)."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.encode.auto import choose_store, is_store, store_folder, store_size
    from longtake.encode.autoencoder import fit_autoencoder
    from longtake.encode.fit import FittingStore, open_fitting_store
    from longtake.encode.run import EncodeOptions, EncodeResult, encode
    from longtake.encode.verify import VerifyResult, verify_store

__getattr__ = lazy_exports(__name__)
