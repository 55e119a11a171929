"""Does the fusion change a model's answers? lm_eval runs tasks with the flag off and on.

pip install lm_eval
python examples/accuracy.py MODEL --tasks gsm8k --limit 200

Each sample is compared with itself: how many answers differ, how many became wrong or right, and
how likely that is by chance (sign test). The status is 1 if the loss is not.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

ARMS = {"off": {}, "on": {"pass_config": {"fuse_aiter_qk_rope_kvcache_mla": True}}}


def main() -> int:
    """Run both arms, each in a process of its own, and compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tasks", default="gsm8k", help="of lm_eval, separated by commas")
    parser.add_argument("--include-path", help="a folder with the YAML files of your own tasks")
    parser.add_argument("--limit", type=int, help="samples of a task; all by default")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: arguments of vLLM")
    parser.add_argument("--out", type=Path, default=Path("build/accuracy"), help="for the samples")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        evaluate(options)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for arm in ARMS:
        subprocess.run([sys.executable, *sys.argv, "--arm", arm], check=True)
        found[arm] = json.loads((options.out / f"{arm}.json").read_text())
    lines, lost = compare(found["off"], found["on"])
    print("\n".join(lines))
    return int(lost)


def evaluate(options: argparse.Namespace) -> None:
    """One arm: write [task, sample, filter, answer, {metric: value}] of every sample."""
    from mla_fusion import plugin

    plugin.register()  # first: vLLM checks the arguments of LLM before it loads plugins
    import lm_eval
    from lm_eval.tasks import TaskManager

    engine = {"pretrained": options.model, **options.engine}
    engine["compilation_config"] = {**engine.get("compilation_config", {}), **ARMS[options.arm]}
    results = lm_eval.simple_evaluate(
        model="vllm",
        model_args=engine,
        tasks=options.tasks.split(","),
        task_manager=TaskManager(include_path=options.include_path),
        limit=options.limit,
        batch_size="auto",
        log_samples=True,
    )
    rows = [
        [task, x["doc_id"], x["filter"], x["resps"], {name: x[name] for name in x["metrics"]}]
        for task, samples in results["samples"].items()
        for x in samples
    ]
    (options.out / f"{options.arm}.json").write_text(json.dumps(rows))


def compare(off: list, on: list) -> tuple[list[str], bool]:
    """(a line for each metric of each task, whether one is lower by more than chance)."""
    pairs: dict[str, list[tuple]] = {}
    by_sample = {json.dumps(row[:3]): row[3:] for row in on}
    for task, sample, name, answer, metrics in off:
        answer_on, metrics_on = by_sample[json.dumps([task, sample, name])]
        for metric, value in metrics.items():
            key = f"{task}, {name}, {metric}"
            pairs.setdefault(key, []).append((answer != answer_on, value, metrics_on[metric]))
    lines, lost = [], False
    for key, samples in pairs.items():
        differ, before, after = map(sum, zip(*samples, strict=True))
        worse = sum(b > a for _, b, a in samples)
        better = sum(b < a for _, b, a in samples)
        chance = by_chance(worse, better)
        lost |= worse > better and chance < 0.05
        count = len(samples)
        lines.append(
            f"{key}: off {before / count:.4f}, on {after / count:.4f}; of {count} samples {differ} "
            f"answers differ, {worse} lower, {better} higher (p = {chance:.2g})"
        )
    return lines, lost


def by_chance(worse: int, better: int) -> float:
    """How likely so uneven a split is, or more, if each change goes either way (two-sided)."""
    changes = worse + better
    tail = sum(math.comb(changes, k) for k in range(min(worse, better) + 1))
    return min(1.0, 2 * tail / 2**changes)


if __name__ == "__main__":  # vLLM starts processes of its own, which import this file
    sys.exit(main())
