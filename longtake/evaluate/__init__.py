"""What a run shows of itself while it trains: videos of fixed prompts and start images, losses of held-out clips."""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.evaluate.config import LOSSES_FILE, ValidationConfig
    from longtake.evaluate.heldout import level_losses
    from longtake.evaluate.validation import FOLDER, Validation, forget_after, missing, plan_validation

__getattr__ = lazy_exports(__name__)
