"""Write gpu_summary.md, and the rates of this card in the file that `longtake plan` reads."""

import json


def write(out, scratch, runs):
    """runs: the contents of gpu_first.json and gpu_second.json, as far as they exist."""
    jobs = {name: job for run in runs for name, job in run["jobs"].items()}
    about = jobs.get("about", {}).get("facts", {})
    lines = [f"# {about.get('gpu')}, PyTorch {about.get('torch')}, commit {runs[-1]['commit']}"]
    lines += _table(
        "job | outcome | seconds | alone",
        [[name, *_values(job, "outcome seconds alone")] for name, job in jobs.items()],
    )
    for name, job in jobs.items():
        if job["outcome"] not in ("ok", "not started"):
            lines += ["", f"{name}, {job['outcome']}:", "```", *job["traceback"][-15:], "```"]
    compared, trainings = [], []
    for name, job in jobs.items():
        for line in (job["facts"], *job["figures"].get("runs", ())):
            label = f"{name} {line.get('preset') or line.get('budget') or ''}"
            compared += _against_forecast(f"{label}, GiB", line, "peak_bytes", "forecast_bytes", 2**30)
            compared += _against_forecast(f"{label}, ms", line, "step_ms", "forecast_ms", 1) if job["alone"] else []
        if "waits" in job["facts"]:
            waits = "; ".join(f"{count} x {place}" for place, count in job["facts"]["waits"].items())
            trainings.append([name, *_values(job, "recompiles graph_breaks"), waits or "none"])
    lines += _table("of | measured | forecast | forecast / measured", compared)
    lines += _table("training | recompiles | graph breaks | host waits from step 4 on", trainings)
    for file in (scratch / "cache/longtake/rates").glob("*.json"):
        rates = _sustained(json.loads(file.read_text()), jobs)
        (out / file.name).write_text(json.dumps(rates, indent=1) + "\n")
        lines += _table(f"rate in {file.name} | FLOP/s, bytes/s or seconds", list(rates.items()))
    (out / "gpu_summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sustained(rates, jobs):
    """Rates by `longtake plan --measure`, with products as sustained for 8 s and attention at the other widths."""
    if products := jobs.get("about", {}).get("facts", {}).get("gemm_sustained"):
        rates["products"] = products
    for line in jobs.get("attention", {}).get("figures", {}).get("runs", ()):
        pairs = [rates["attention"].get(str(line["width"])), [line["rates"]["forward"], line["rates"]["backward"]]]
        rates["attention"][str(line["width"])] = min(filter(None, pairs), key=lambda pair: 1 / pair[0] + 2.5 / pair[1])
    return rates


def _values(job, names):
    return [job[name] for name in names.split()]


def _against_forecast(label, figures, measured, forecast, unit):
    pair = [figures.get(measured), figures.get(forecast)]
    if not all(pair):
        return []
    return [[label, *(f"{value / unit:.2f}" for value in pair), f"{pair[1] / pair[0]:.2f}"]]


def _table(head, rows):
    body = [head, "|".join("---" for _ in head.split("|")), *(" | ".join(map(str, row)) for row in rows)]
    return ["", *(f"| {line} |" for line in body)] if rows else []
