"""Golden MMDiT cases: tensors made by the reference program, as inputs of our model and what it must answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from longtake.contracts import Conditions
from longtake.models.config import MMDiTConfig
from longtake.models.layers import patchify, timestep_features, unpatchify
from longtake.models.mmdit import MMDiT
from tests.precision import within

FOLDER = Path(__file__).parents[1] / "golden" / "opensora_v2"
KINDS = {
    "split": [
        f"{rope}{cond}{guidance}"
        for rope in ("half", "interleaved")
        for cond in ("", "_cond")
        for guidance in ("", "_guidance")
    ],
    "fused": ["half", "interleaved_guidance"],
    "patch1": ["half_cond"],
}
CASES = [(kind, case) for kind, cases in KINDS.items() for case in cases]


@cache
def read_golden(name: str) -> tuple[dict, dict[str, Tensor]]:
    """(settings, tensors) of `name`.safetensors."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        return json.loads(file.metadata()["info"]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def weights_path(kind: str) -> Path:
    return FOLDER / f"mmdit_{kind}_weights.safetensors"


@dataclass(frozen=True)
class GoldenCase:
    config: MMDiTConfig
    x: Tensor
    t: Tensor
    conditions: Conditions
    out: Tensor  # packed tokens
    gradients: dict[str, Tensor]

    def run(self, model: MMDiT) -> Tensor:
        """The model's answer as packed tokens, with gradients of mean(out ** 2) left in the parameters."""
        out = patchify(model(self.x, self.t, self.conditions), self.config.patch_size)
        out.square().mean().backward()
        return out.detach()


def golden_case(kind: str, case: str, **changes: object) -> GoldenCase:
    info, tensors = read_golden(f"mmdit_{kind}_cases")
    config = MMDiTConfig(**{**info["config"], **info["cases"][case], **changes})
    frames, rows, columns = info["grid_thw"]
    size = (frames, rows * config.patch_size, columns * config.patch_size)
    conditions = Conditions(
        text=tensors["in.txt"],
        vector=tensors["in.y_vec"],
        guidance=tensors["in.guidance"],
        visual=unpatchify(tensors["in.cond"], size, config.patch_size),
    )
    prefix = f"{case}.grad."
    return GoldenCase(
        config=config,
        x=unpatchify(tensors["in.img"], size, config.patch_size),
        t=tensors["in.timesteps"],
        conditions=conditions,
        out=tensors[f"{case}.out"],
        gradients={key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)},
    )


def golden_model(kind: str, config: MMDiTConfig) -> MMDiT:
    """The reference's weights in fp32; tensors of variants that `config` switches off are left out."""
    _, weights = read_golden(f"mmdit_{kind}_weights")
    model = MMDiT(config)
    wanted = model.state_dict().keys()
    model.load_state_dict({name: value.float() for name, value in weights.items() if name in wanted})
    return model


@cache
def rounding(elsewhere: float = 2e-4) -> float:
    """What a golden tensor may be off by, as a share of its largest value: 5e-5, but `elsewhere` on a processor that
    rounds `exp` otherwise than the reference's.

    A unit in the last place of the timestep features' frequencies is up to 2.4e-4 of a feature at a guidance of 4.
    """
    _, parts = read_golden("mmdit_parts")
    same_exp = torch.allclose(timestep_features(parts["time.t"]), parts["time.embedding"], rtol=0, atol=1e-6)
    return 5e-5 if same_exp else elsewhere


def assert_equals_golden(case: GoldenCase, model: MMDiT) -> None:
    """The output and all gradients, up to `rounding`."""
    assert within(_distance(case.run(model), case.out), rounding())
    assert case.gradients
    parameters = dict(model.named_parameters())
    for name, expected in case.gradients.items():
        assert within(_distance(parameters[name].grad, expected), rounding()), name


def _distance(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found - expected).abs().max() / expected.abs().max())


def tiny_config(**changes: object) -> MMDiTConfig:
    """A model of a few thousand parameters."""
    sizes = {
        "in_channels": 16,
        "vec_in_dim": 16,
        "context_in_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 2,
        "axes_dim": (4, 6, 6),
    }
    return MMDiTConfig(**{**sizes, **changes})


def random_inputs(
    config: MMDiTConfig, size: tuple[int, int, int] = (2, 4, 6), batch: int = 2, text_tokens: int = 5
) -> tuple[Tensor, Tensor, Conditions]:
    """(x, t, conditions) for a model of `config`, every condition given."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    channels = config.latent_channels
    conditions = Conditions(
        text=draw(batch, text_tokens, config.context_in_dim),
        vector=draw(batch, config.vec_in_dim),
        guidance=torch.full((batch,), 4.0),
        visual=draw(batch, 1 + channels, *size),
    )
    return draw(batch, channels, *size), torch.linspace(0.2, 0.9, batch), conditions
