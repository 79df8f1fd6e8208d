"""The files of a table spread over a Ray cluster (Ray Data), with the same answers as on one machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from longtake.contracts import UserError
from longtake.data.probing.pool import Crew

_ROWS = 256  # files asked about in one task: a journal is at most so many behind for each process


def ask_on_ray(ask: Callable[[str], Any], workers: int, files: Sequence[str]) -> Generator[tuple[int, Any], None, None]:
    """`(place, ask(files[place]))` as they are ready; answers must be JSON values.

    Uses the cluster that RAY_ADDRESS names, or makes one of this machine. `workers`: processes in the whole cluster,
    0: one a core. Every machine must see the files under the same paths and have Longtake installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError("--engine ray: Ray is not installed; pip install 'longtake[ray]'") from error
    if not files:
        return
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    cores = int(ray.cluster_resources().get("CPU", 1))
    num_tasks = -(-len(files) // _ROWS)
    table = pa.table({"place": np.arange(len(files)), "file": pa.array(files, pa.string())})
    blocks = [table.slice(at, _ROWS) for at in range(0, len(files), _ROWS)]
    crews = max(1, min(workers or cores, cores, num_tasks))
    answered = ray.data.from_arrow(blocks).map_batches(
        _Asker,
        fn_constructor_args=(ask,),
        batch_size=_ROWS,
        batch_format="pyarrow",
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=crews),
    )
    for batch in answered.iter_batches(batch_size=None, batch_format="pyarrow"):
        for place, answer in zip(batch["place"].to_pylist(), batch["answer"].to_pylist(), strict=True):
            yield place, json.loads(answer)


class _Asker:
    """Lives in a process of the cluster; a second process beside it does the asking, since files may crash it."""

    def __init__(self, ask: Callable[[str], Any]):
        """`ask` is called in the second process."""
        self._crew = Crew(ask, workers=1)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Columns place and file become columns place and answer."""
        places = batch["place"].to_numpy()
        found = list(self._crew.answers(batch["file"].to_pylist()))
        return pa.table(
            {
                "place": pa.array([int(places[at]) for at, _ in found]),
                "answer": pa.array([json.dumps(answer) for _, answer in found]),
            }
        )
