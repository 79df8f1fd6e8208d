"""Latents and text embeddings ahead of time: what to encode (`plan`), for whom (`fingerprint`), the work (`run`),
whether a store fits a run (`fit`) and is undamaged (`verify`)."""

from longtake.encode.fingerprint import make_fingerprint, weights_digest
from longtake.encode.fit import FittingStore, open_fitting_store
from longtake.encode.plan import Plan, encode_inputs, make_plan
from longtake.encode.run import EncodeOptions, EncodeResult, encode
from longtake.encode.verify import VerifyResult, verify_store

__all__ = [
    "EncodeOptions",
    "EncodeResult",
    "FittingStore",
    "Plan",
    "VerifyResult",
    "encode",
    "encode_inputs",
    "make_fingerprint",
    "make_plan",
    "open_fitting_store",
    "verify_store",
    "weights_digest",
]
