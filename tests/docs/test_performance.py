"""The figures of docs/performance.md are those of the raw files beside it."""

from __future__ import annotations

import json
from statistics import fmean, median
from typing import Any

from support.pages import ROOT

PAGE = " ".join((ROOT / "docs/performance.md").read_text().split())
LINES = (ROOT / "docs/measurements.md").read_text().splitlines()
DETAILS = " ".join(" ".join(LINES).split())
PARTS = ("step_s", "generation_s", "rest_s")
README = " ".join((ROOT / "README.md").read_text().split())


def raw(name: str) -> Any:
    return json.loads((ROOT / f"docs/results/{name}.json").read_text())


def spread(values: list[float], unit: str = "") -> str:
    return f"{median(values):.2f}{unit} ({min(values):.2f}–{max(values):.2f})"


def test_the_table_is_the_first_thing_on_the_page() -> None:
    lines = (ROOT / "docs/performance.md").read_text().splitlines()
    assert next(number for number, line in enumerate(lines) if line.startswith("|")) < 12
    assert next(line for line in lines if line.startswith("|")).startswith("| your situation | use | measured against")


def test_whole_steps() -> None:
    for name in ("h200/step", "h200/step_1.5B"):
        found = raw(name)["fixed"]
        for side, label in (("poise", "**poise**"), ("trl", "TRL")):
            assert f"| {label} | {found[side]['step_s']['median']:.2f} (" in DETAILS
        assert f"| **TRL / poise** | **{found['ratio']['step_s']['median']:.1f}**" in DETAILS
    found = raw("cpu/step")["sampled"]
    theirs, ours = (found[side]["step_s"]["median"] for side in ("trl", "poise"))
    assert f"{theirs:.2f} / {ours:.2f} s a step (**{found['ratio']['step_s']['median']:.1f}×**" in PAGE
    assert f"{raw('cpu/step_fixed')['fixed']['ratio']['step_s']['median']:.1f}× if all responses" in PAGE


def bare_vllm(shape: str, file: str) -> list[float]:
    """Seconds of vLLM's own ``generate`` for the responses of a step."""
    rows = raw(f"h200/{file}")["measurements"][f"rollout-{shape}-vllm"]["rows"]
    calls: list[float] = next(row["seconds"] for row in rows if row["case"] == "512 × 256")
    assert f"{calls[0]:.2f} and {calls[1]:.2f} s at {shape}" in DETAILS
    return calls


def steps_beside_vllm(shape: str, file: str) -> dict[str, list[dict[str, float]]]:
    """The steps of each trainer, those of the warm-up first if they were kept."""
    found = {}
    for side, name in (("poise", "poise"), ("trl", "trl-vllm")):
        fixed = raw(f"h200/{file}")["measurements"][f"step-{shape}-{name}"]["fixed"]
        found[side] = [step[side] for step in [*fixed.get("warm_up_each", []), *fixed["each"]]]
    return found


def medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(step[key] for step in steps) for key in steps[0]}


def test_whole_steps_beside_trl_with_vllm() -> None:
    whole, ratios, means = [], [], []
    for shape, rollout in (("135M", "vllm_rollout"), ("1.5B", "vllm_rollout_2048_1.5B")):
        steps = steps_beside_vllm(shape, f"step_vllm_{shape}")
        shown = [f"{step['step_s']:.1f}" for step in steps["trl"]]
        assert f"{', '.join(shown[:-1])} and {shown[-1]} s at {shape}" in DETAILS
        for side, label in (("poise", "**poise**"), ("trl", "TRL with vLLM")):
            steps[side] = steps[side][1:]  # all but the first are alike
            cells = [spread([step[key] for step in steps[side]]) for key in PARTS]
            cells += [f"{medians(steps[side])[key]:.1f} GiB" for key in ("extra_gib", "peak_gib")]
            assert f"| {shape}: {label} | {' | '.join(cells)} |" in DETAILS
        trl, poise = medians(steps["trl"]), medians(steps["poise"])
        factors = [trl[key] / poise[key] for key in PARTS]
        cells = [f"**{factors[0]:.1f}**", *(f"{factor:.1f}" for factor in factors[1:])]
        assert f"| {shape}: **TRL / poise** | {' | '.join(cells)} | | |" in DETAILS
        assert f"{trl['step_s']:.1f} / {poise['step_s']:.2f} s at {shape} (**{factors[0]:.1f}×**" in PAGE
        assert f"{poise['peak_gib']:.1f} / {trl['peak_gib']:.1f}" in PAGE
        assert f"{trl['step_s']:.1f} s" in README
        assert f"{poise['step_s']:.2f} s" in README
        means.append(fmean(s["step_s"] for s in steps["trl"]) / fmean(s["step_s"] for s in steps["poise"]))
        whole.append(trl["rest_s"] + min(bare_vllm(shape, rollout)))
        ratios.append(whole[-1] / poise["step_s"])
    assert f"{whole[0]:.1f} and {whole[1]:.1f} s: **{ratios[0]:.1f} and {ratios[1]:.1f} times**" in DETAILS
    again = raw("h200/vllm_rollout_2048")["measurements"]["rollout-135M-vllm"]["rows"][0]
    elsewhere = median(again["seconds"]) + medians(steps_beside_vllm("135M", "step_vllm_135M")["trl"][1:])["rest_s"]
    elsewhere /= median(poise_steps("step_trl_compiled", "step-135M-poise"))
    assert f"and poise's step there, it is {elsewhere:.1f}" in DETAILS
    assert f"about {ratios[0]:.0f} to {elsewhere:.0f}× and {ratios[1]:.1f}×" in PAGE
    assert f"are {means[0]:.1f} (where one of poise's four steps took 2.00 s) and {means[1]:.1f}" in DETAILS
    earlier = []
    for shape in ("135M", "1.5B"):
        sides = steps_beside_vllm(shape, "step_vllm")
        earlier.append(medians(sides["trl"])["step_s"] / medians(sides["poise"])["step_s"])
    assert f"took {earlier[0]:.1f} (135M) and {earlier[1]:.1f} (1.5B) times as long as poise's" in DETAILS


def test_what_trl_spends_on_vllm() -> None:
    steps = steps_beside_vllm("1.5B", "step_vllm_1.5B")["trl"][1:]
    sampling, vllm, push = ([step[key] for step in steps] for key in ("generation_s", "vllm_s", "push_s"))
    assert f"of {median(sampling):.2f} s: vLLM's `generate` {spread(vllm, ' s')}, pushing the weights" in DETAILS
    assert f"{spread(push, ' s')}, the rest is TRL's" in DETAILS
    bare = median(bare_vllm("1.5B", "vllm_rollout_2048_1.5B"))
    assert f"{(median(vllm) - bare) / (512 * 256) * 1e6:.0f} µs a token less" in DETAILS
    rows = raw("h200/vllm_rollout_2048_1.5B")["measurements"]["rollout-1.5B-vllm"]["rows"]
    through = next(median(row["seconds"]) for row in rows if row["engine"] == "rollout.engine=vllm")
    assert f"loses only {(through - bare) / (512 * 256) * 1e6:.0f} µs a token to bare vLLM" in DETAILS
    nothing, *more = raw("cpu/vllm_asked")["measurements"]["extra-1M-vllm-asked"]["rows"]
    text, logp, both = (
        [(asked - plain) / row["tokens"] * 1e6 for asked, plain in zip(row["seconds"], nothing["seconds"], strict=True)]
        for row in more
    )
    assert f"costs vLLM {median(both):.0f} µs a token ({min(both):.0f} to {max(both):.0f}; text alone" in DETAILS
    assert f"text alone {median(text):.0f}, log-probabilities alone {median(logp):.0f};" in DETAILS


def poise_steps(file: str, name: str, part: str = "step_s") -> list[float]:
    """Seconds of poise's steps at 135M but the first."""
    fixed = raw(f"h200/{file}")["measurements"][name]["fixed"]
    found = [step["poise"][part] for step in [*fixed["warm_up_each"], *fixed["each"]]][1:]
    assert len(found) == 12
    return found


def test_poise_over_thirteen_steps_with_either_engine() -> None:
    native = poise_steps("step_trl_compiled", "step-135M-poise")
    assert f"at 135M, on the machine of 1.5B's figures: {spread(native, ' s')} after the first" in DETAILS
    both = "step_poise_vllm", "extra-135M-poise-vllm"
    vllm, sampling = poise_steps(*both), poise_steps(*both, "generation_s")
    assert f"with it takes {spread(vllm, ' s')} at 135M, {median(sampling):.2f} s of it sampling" in DETAILS
    assert f"With the native engine it takes {median(native):.2f} s there" in DETAILS
    engines = " ".join((ROOT / "docs/engines.md").read_text().split())
    assert f"a whole step at 135M {median(vllm):.2f} s, with the native engine {median(native):.2f} s" in engines


def test_the_fused_step_beside_compiled_layers() -> None:
    log = " ".join((ROOT / "docs/log.md").read_text().split())
    fused, compiled = raw("h200/rollout_fused")["rows"]
    words = f"takes {spread(fused['wall_s'], ' s')}, compiled layers {spread(compiled['wall_s'], ' s')}"
    assert words in log
    assert f"{1 - median(fused['wall_s']) / median(compiled['wall_s']):.0%}".replace("%", " %") + " less time" in log
    assert fused["extra_bytes"] == compiled["extra_bytes"]
    assert f"the same extra memory ({fused['extra_bytes'] / 2**30:.1f} GiB)" in log


def test_the_start_on_a_gpu() -> None:
    first, *later = raw("h200/start")["runs"]
    until = [run["until the first step"] for run in (first, *later)]
    assert f"| **until the first step** | {until[0]:.1f} s | {median(until[1:]):.1f} s |" in DETAILS
    assert f"{median(until[1:]):.1f} s to the first step, {until[0]:.1f} s with empty caches" in PAGE
    known: dict[str, tuple[str, ...]] = {
        "the interpreter, checking the settings": ("interpreter", "settings"),
        "imports, while CUDA starts": ("imports",), "loading the model, with two trials": ("load_policy",),
        "the engine, with its trial": ("build_sampler",), "all else": ("preflight", "rest"),
    }  # fmt: skip
    for words, parts in known.items():
        begun, *kept = (sum(run["parts"][part][0] for part in parts) for run in (first, *later))
        assert f"| {words} | {begun:.1f} s | {median(kept):.1f} s |" in DETAILS


def test_sampling() -> None:
    for name in ("rollout", "rollout_1.5B"):
        seconds = {row["way"]: median(row["wall_s"]) for row in raw(f"h200/{name}")["rows"]}
        generate, native = seconds["generate"], seconds["native"]
        assert f"**{generate / native:.1f}×**" in PAGE
    native, generate = (row["wall_s"][0] for row in raw("h200/rollout_uneven")["rows"])
    assert f"| {generate:.2f} | 7.8 k | **{generate / native:.1f}** |" in DETAILS
    together = {row["rows"]: row["seconds"] for row in raw("h200/rollout_growth")["rows"] if row["kind"] == "rows"}
    shown = "1 response {:.2f} s, 128 in {:.2f} s, 512 in {:.2f} s, 2,048 in {:.2f} s"
    assert shown.format(*(together[rows] for rows in (1, 128, 512, 2048))) in PAGE


def test_sampling_beside_vllm() -> None:
    shapes, every, firsts = [], [], []
    for name in ("vllm_rollout", "vllm_rollout_1.5B"):
        rows = [row for found in raw(f"h200/{name}")["measurements"].values() for row in found["rows"]]
        shapes.append({(row["engine"], row["case"]): median(row["seconds"]) for row in rows})
        vllm, native = (shapes[-1][engine, "512 × 256"] for engine in ("vllm", "native"))
        firsts.append(vllm / native)
    labels = {"long prompts": "512 × 256, long prompts", "uneven": "512, uneven"}
    for _, case in (key for key in shapes[0] if key[0] == "vllm"):
        cells = []
        for seconds in shapes:
            native, other = (seconds[engine, case] for engine in ("native", "vllm"))
            every.append(other / native)
            cells += [f"{native:.2f}", f"{other:.2f}", f"{every[-1]:.1f}"]
        assert " ".join(f"| {labels.get(case, case)} | {' | '.join(cells)} |".split()) in DETAILS.replace("**", "")
    again = sampling_again()
    few = [*every, *(factors[0] for factors in again.values())]  # those with up to 512 responses
    assert len(few) == 12
    assert f"**{min(few):.1f} to {max(few):.1f}×** in twelve cases on two machines" in PAGE
    small, large = ((first, factors[0]) for first, factors in zip(firsts, again.values(), strict=True))
    assert f"{small[0]:.1f} and {small[1]:.1f}× at 135M, {large[0]:.1f} and {large[1]:.1f}× at 1.5B" in PAGE
    assert f"vLLM takes {min(few):.1f} to {max(few):.1f} times as long as poise, with up to 512 responses" in README


def sampling_again() -> dict[str, list[float]]:
    """vLLM / native by shape, with 512 and with 2,048 responses; the table is checked."""
    cells: dict[str, list[str]] = {}
    factors: dict[str, list[float]] = {}
    for shape, file in (("135M", "vllm_rollout_2048"), ("1.5B", "vllm_rollout_2048_1.5B")):
        measured = raw(f"h200/{file}")["measurements"]
        rows = [row for engine in ("native", "vllm") for row in measured[f"rollout-{shape}-{engine}"]["rows"]]
        found = {(row["engine"], row["case"]): row["seconds"] for row in rows}
        for case in ("512 × 256", "2048 × 256"):
            for engine in ("native", "vllm"):
                cells.setdefault(engine, []).append(spread(found[engine, case]))
            factors.setdefault(shape, []).append(median(found["vllm", case]) / median(found["native", case]))
        for case, name in (("512 × 256", "through poise"), ("push the weights", "push")):
            cells.setdefault(name, []).append(spread(found["rollout.engine=vllm", case]))
    apart = raw("h200/vllm_process")["measurements"]["extra-135M-vllm-process"]["rows"]
    for line in (
        f"| **native** | {' | '.join(cells['native'])} |",
        f"| vLLM's `generate`, same process | {' | '.join(cells['vllm'])} |",
        f"| vLLM, engine in a process of its own | {' | '.join(spread(row['seconds']) for row in apart)} | | |",
        f"| `rollout.engine=vllm` | {cells['through poise'][0]} | | {cells['through poise'][1]} | |",
        f"| of that, pushing the weights | {cells['push'][0]} | | {cells['push'][1]} | |",
    ):
        assert line in DETAILS
    few, many = zip(*factors.values(), strict=True)
    assert f"| **vLLM / native** | **{few[0]:.1f}** | {many[0]:.1f} | **{few[1]:.1f}** | {many[1]:.1f} |" in DETAILS
    return factors


def kernel_kind(name: str) -> str:
    """The row of the table that a kernel belongs to."""
    kinds = {"_attend": "attention", "_add_norm": "residual sums and norms", "silu": "SiLU", "_draw": "drawing tokens"}
    for word, kind in kinds.items():
        if word in name:
            return kind
    product = any(word in name for word in ("nvjet", "gemm", "cutlass")) and "flash" not in name
    return "matrix products" if product else "all else"


def test_kernels_of_sampling() -> None:
    table: dict[str, list[str]] = {}
    for found in raw("h200/rollout_kernels")["shapes"]:
        kernels = [kernel for kernel in found["kernels"] if not kernel["kernel"].startswith("cuda")]  # host calls
        for kind in {kernel_kind(kernel["kernel"]) for kernel in kernels}:
            own = [kernel for kernel in kernels if kernel_kind(kernel["kernel"]) == kind]
            table.setdefault(kind, []).append(f"{sum(k['ms'] for k in own):,.0f} | {sum(k['calls'] for k in own):,}")
        every = f"{1000 * found['kernel_s']:,.0f} | {sum(kernel['calls'] for kernel in kernels):,}"
        table.setdefault("**kernels together**", []).append(every)
    assert len(table) == 7
    for kind, cells in table.items():
        assert f"| {kind} | {' | '.join(cells)} |" in DETAILS


def test_turns_and_runs_side_by_side() -> None:
    kept, again = (median(raw("h200/turns")["wall_s"][way]) for way in ("kept", "anew"))
    assert f"{kept:.2f} s against {again:.2f} s" in PAGE
    assert f"(**{again / kept:.1f}×**)" in PAGE
    alone, together = (row["runs_an_hour"] for row in raw("h200/side_by_side")["measured"])
    assert f"{together:,.0f} against {alone:.0f} runs an hour one after another (**{together / alone:.1f}×**)" in PAGE


def test_head() -> None:
    for width, words in ((576, "at 135M's sizes"), (2048, "at d = 2,048")):
        rows = [row for row in raw("h200/head")["rows"] if row["tokens"] == 8192 and row["width"] == width]
        ms = {row["way"]: 1000 * median(row["seconds"]) for row in rows}
        form = ".2f" if width == 576 else ".1f"
        assert f"{ms['trl']:{form}} / {ms['poise']:{form}} ms (**{ms['trl'] / ms['poise']:.1f}×**) {words}" in PAGE
        for way in ("poise", "poise, whole"):
            for factor in (ms[way] / ms["gemm"], ms["trl"] / ms[way]):
                assert f"{factor:.2f}×" in PAGE
