"""Write gpu_summary.md of all results of the commands (`runs`), and the rates that `longtake plan` reads."""

import json

COMPARED = {"GiB": ("peak_bytes", "forecast_bytes", 2**30), "ms": ("step_ms", "forecast_ms", 1)}  # ms: of jobs alone


def write(out, rates_folder, runs):
    jobs = {name: job for run in runs for name, job in run["jobs"].items()}
    machine = next((job["machine"] for job in jobs.values() if job.get("machine")), {})
    outcomes, failures, compared, trainings = [], [], [], []
    for name, job in jobs.items():
        outcomes.append([name, job["outcome"], job["seconds"], job["alone"]])
        if job.get("traceback"):
            failures += ["", f"{name}, {job['outcome']}:", "```", *job["traceback"][-15:], "```"]
        if "waits" in job["facts"]:
            waits = "; ".join(f"{count} x {place}" for place, count in job["facts"]["waits"].items())
            trainings.append([name, job["recompiles"], job["graph_breaks"], waits or "none"])
        for line in (job["facts"], *job["figures"].get("runs", ())):
            for unit, (measured, forecast, divisor) in COMPARED.items():
                if line.get(measured) and line.get(forecast) and (unit == "GiB" or job["alone"]):
                    label = f"{name} {line.get('preset') or line.get('remat') or ''}, {unit}"
                    values = line[measured] / divisor, line[forecast] / divisor, line[forecast] / line[measured]
                    compared.append([label, *(f"{value:.2f}" for value in values)])
    lines = [f"# {machine.get('gpu')}, PyTorch {machine.get('torch')}, commit {runs[-1]['commit']}"]
    lines += [*_table("job | outcome | seconds | alone", outcomes), *failures]
    lines += _table("of | measured | forecast | forecast / measured", compared)
    lines += _table("training | recompiles | graph breaks | host waits from step 4 on", trainings)
    for file in rates_folder.glob("*.json"):
        rates = _sustained(json.loads(file.read_text()), jobs)
        (out / file.name).write_text(json.dumps(rates, indent=1) + "\n")
        lines += _table(f"rate in {file.name} | FLOP/s, bytes/s or seconds", list(rates.items()))
    (out / "gpu_summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sustained(rates, jobs):
    """Rates by `longtake plan --measure`, with products as sustained for 8 s and attention at the other widths."""
    lines = {name: job["figures"].get("runs", ()) for name, job in jobs.items()}
    for line in (line for line in lines.get("sustained", ()) if line["what"] == "gemm, 8 s"):
        rates["products"] = 1e12 * line["tflops"]
    for line in lines.get("attention", ()):
        pairs = [rates["attention"].get(str(line["width"])), [line["rates"]["forward"], line["rates"]["backward"]]]
        rates["attention"][str(line["width"])] = min(filter(None, pairs), key=lambda pair: 1 / pair[0] + 2.5 / pair[1])
    return rates


def _table(head, rows):
    body = [head, " | ".join("---" for _ in head.split("|")), *(" | ".join(map(str, row)) for row in rows)]
    return ["", *(f"| {line} |" for line in body)] if rows else []
