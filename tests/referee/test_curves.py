"""The report's curves: axes, zoom, smoothing, the choice of metrics, and tables to keep; in a real browser."""

import csv
import re
from math import log

import pytest

from poise.referee.report.html import write_report
from support.run_folders import look, make_run, see

METRICS = {
    "reward/mean": 0.5,
    "optim/loss": 1.5,
    "time/problems": 0.25,
    "reg/low/weight_p0": 0.98,
    "optim/drift": 1.5e-14,
}


@pytest.fixture
def curves(page, tmp_path):
    """The curves of a run with these values of the reward, one a step."""

    def opened(values, **more):
        folder = make_run(tmp_path / "run", steps=())
        for step, value in enumerate(values, 1):
            folder.log(step, {"reward/mean": value, **more})
        look(page, tmp_path, folder, tab="curves")

    return opened


def drawn(page, label="mean", number=0):
    """The points of a line, in the chart's own units."""
    d = page.locator(f"svg[aria-label='{label}'] path").nth(number).get_attribute("d")
    values = [float(n) for n in re.findall(r"-?[\d.]+", d)]
    return list(zip(values[::2], values[1::2], strict=True))


def titles(page):
    return page.locator(".card h3").all_inner_texts()


def test_smoothing_draws_a_moving_average_over_the_faint_line(page, curves):
    curves([0.0, 1.0, 0.0, 1.0])
    raw = drawn(page)
    page.locator("#smooth").fill("0.5")
    assert drawn(page) == raw  # faint, below
    assert page.locator("svg[aria-label='mean'] path").first.get_attribute("opacity") == "0.3"
    means = [0.0, 0.5 / 0.75, 0.25 / 0.875, 0.625 / 0.9375]  # without a bias towards the 0 that it starts from
    assert [y for _, y in drawn(page, number=1)] == pytest.approx([142 - 130 * mean for mean in means], abs=0.1)
    assert page.inner_text(".legend") == "mean 1 (0.6667)"
    page.locator("#smooth").fill("0")
    assert page.locator("svg[aria-label='mean'] path").count() == 1


def test_a_divergence_that_is_only_rounding_is_drawn_flat(page, curves):
    curves([0.0, 1.0], **{"optim/drift": 2e-13})
    assert page.inner_text(".card:has(h3:text('Drift in the update')) .legend") == "drift 0"


def test_a_logarithmic_axis_puts_powers_of_ten_at_equal_distances(page, curves):
    curves([1.0, 10.0, 100.0, 0.0, 1000.0])
    page.check("#log-y")
    assert [y for _, y in drawn(page)] == pytest.approx(
        [142, 142 - 130 / 3, 142 - 260 / 3, 12], abs=0.1
    )  # 0 has no place
    assert page.locator("svg text[text-anchor='end']").all_text_contents() == [
        *("1", "2", "5", "10", "20", "50", "100", "200", "500", "1000")
    ]
    page.check("#log-x")
    places = [x for x, _ in drawn(page)]
    assert (places[1] - places[0]) / (places[2] - places[1]) == pytest.approx(log(2) / log(1.5), rel=0.01)
    page.uncheck("#log-y")
    assert drawn(page)[0][1] == pytest.approx(142 - 130 / 1000, abs=0.1)


def test_a_metric_without_values_above_zero_stays_linear(page, curves):
    curves([-1.0, -2.0, 0.0])
    page.check("#log-y")
    assert [y for _, y in drawn(page)] == pytest.approx([77, 142, 12], abs=0.1)


def test_zooming_a_logarithmic_axis(page, curves):
    curves([1.0] * 100)
    page.check("#log-x")
    box = page.locator("svg").first.bounding_box()

    def at(share):
        return box["x"] + box["width"] * (40 + 282 * share) / 330

    page.mouse.move(at(0.5), box["y"] + 60)  # 10 lies in the middle between 1 and 100
    assert page.inner_text(".legend") == "mean 1 at 10"
    page.mouse.down()
    page.mouse.move(at(1.0), box["y"] + 60)
    page.mouse.up()
    assert page.locator("svg text[y='160']").all_text_contents() == ["20", "50"]


def test_metrics_are_chosen_by_name(page, curves):
    curves([0.1, 0.2], **METRICS)
    assert "optim/loss" not in titles(page)
    page.fill("#find", "LOSS")
    assert titles(page) == ["optim/loss"]
    page.fill("#find", "time/")
    assert titles(page) == ["time/problems"]
    page.fill("#find", "gradient of nothing")
    assert page.inner_text(".grid") == "No metric has this in its name."
    page.fill("#find", "")
    page.check("#every")
    assert titles(page)[-2:] == ["optim/loss", "time/problems"]
    page.click("#tab-settings")
    page.click("#tab-curves")
    assert "optim/loss" in titles(page)  # a choice stays


def test_a_click_on_a_legend_hides_the_line(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=())
    for step in (1, 2):
        folder.log(step, {"reward/accuracy/2": step / 10, "reward/accuracy/3": step * 10})
    look(page, tmp_path, folder, tab="curves")
    assert page.locator("svg path").count() == 2
    page.click(".legend button:has-text('accuracy/3')")
    assert page.locator("svg path").count() == 1
    assert page.locator("svg text").first.text_content() == "0.1"  # the axis fits what is left
    assert page.locator(".legend button").all_inner_texts() == ["accuracy/2 0.2", "accuracy/3"]
    page.click(".legend button:has-text('accuracy/3')")
    assert page.locator("svg path").count() == 2


def test_metrics_can_be_saved_as_a_table(page, tmp_path):
    one, two = (make_run(tmp_path / name, steps=()) for name in ("one", "-two"))
    one.log(1, {"reward/mean": 0.125, "=cmd()": 1.0})
    two.log(1, {"reward/mean": 1e-7})
    look(page, tmp_path, one, two, tab="curves")
    with page.expect_download() as download:
        page.click("#csv")
    assert download.value.suggested_filename == "metrics.csv"
    with open(download.value.path(), newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["run", "step", "'=cmd()", "reward/mean"],
        ["one", "1", "1", "0.125"],
        ["'-two", "1", "", "1e-7"],
    ]


def test_weights_are_drawn_from_zero(page, curves):
    curves([0.1, 0.2], **METRICS)
    labels = page.locator(".card:has(h3:text-is('Weight by probability')) text[text-anchor='end']").all_text_contents()
    assert labels[0] == "0"


def test_dashed_lines_have_dashed_legends(page, tmp_path):
    folders = [make_run(tmp_path / name, steps=()) for name in "ab"]
    for folder in folders:
        for step in (1, 2):
            folder.log(step, {"reward/accuracy/2": step, "reward/accuracy/3": 2 * step})
    look(page, tmp_path, *folders, tab="curves")
    dashes = [path.get_attribute("stroke-dasharray") for path in page.locator("svg path").all()]
    assert dashes == [None, "5 3", None, "5 3"]
    marks = page.locator(".legend i").evaluate_all("all => all.map(i => getComputedStyle(i).backgroundImage)")
    assert [mark.startswith("repeating-linear-gradient") for mark in marks] == [False, True, False, True]
    assert "5px" in marks[1]


def outside(page):
    """The labels that do not lie inside their cards."""
    return page.evaluate(
        """() => [...document.querySelectorAll(".card text")].filter((text) => {
          const [a, b] = [text, text.closest(".card")].map((each) => each.getBoundingClientRect());
          return a.left < b.left || a.right > b.right || a.top < b.top || a.bottom > b.bottom;
        }).map((text) => text.textContent)"""
    )


def test_labels_stay_inside_their_cards(page, curves):
    curves([1.5e-14, 2.5e-14, 1.0e-14], **METRICS, **{"optim/grad_norm": 1.5e-14})
    assert outside(page) == []
    assert "1.50e-14" in page.locator("svg text").all_text_contents()


def test_labels_of_figures_stay_inside_their_cards(page, curves):
    curves([1.0])
    names = [f"0.00{i}–0.0000{i}" for i in range(9)]
    page.evaluate(
        """(names) => document.getElementById("main").replaceChildren(el("div", { class: "grid" },
          card("bars", "", bars(names, [{ label: "a", values: names.map((_, i) => -i * 1.234e-15), errors: [] }])),
          card("heat", "", heat(names, names, names.map(() => names.map((_, i) => i * 1.234e-15)))),
          card("density", "", density([1e-12, 1, 1e9]))))""",
        names,
    )
    assert outside(page) == []
    shown = page.locator(".card:has(h3:text-is('bars')) text").all_text_contents()
    assert names[0] in shown
    assert names[1] not in shown  # there is no room for each


# The axis and the zoom


def test_curves_show_values_and_zoom_together(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=range(1, 21))
    look(page, tmp_path, folder, tab="curves")
    charts = page.query_selector_all("svg")
    assert len(charts) == 4
    box = charts[0].bounding_box()
    x = box["x"] + box["width"] * (40 + 282 * 9 / 19) / 330
    page.mouse.move(x, box["y"] + 60)
    legends = [legend.inner_text() for legend in page.query_selector_all(".legend")]
    assert legends[0] == "mean 1 at 10"
    assert "50 at 10" in legends[2]
    page.mouse.down()
    page.mouse.move(x + box["width"] * 0.3, box["y"] + 60)
    page.mouse.up()
    axes = [
        [t.text_content() for t in chart.query_selector_all("text[y='160']")]
        for chart in page.query_selector_all("svg")
    ]
    assert all("20" not in steps and "12" in steps for steps in axes)
    page.click("#unzoom")
    assert page.query_selector("svg text[y='160']:last-of-type").text_content() == "20"


def test_curves_over_tokens_and_seconds(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=())
    for step, tokens in ((1, 1000), (2, 3000), (3, 40_000)):
        folder.log(step, {"reward/mean": step / 10, "tokens/total": tokens, "time/step": 2.5})
    write_report([folder.path], tmp_path / "report.html", x="tokens")
    page.goto((tmp_path / "report.html").as_uri() + "#curves")
    reward = page.locator("svg[aria-label='mean']")

    def at(share):
        box = reward.bounding_box()
        page.mouse.move(box["x"] + box["width"] * (40 + 282 * share) / 330, box["y"] + 60)
        return page.locator(".legend").first.inner_text()

    assert page.eval_on_selector("#axis", "s => s.value") == "tokens"
    assert reward.locator("text[y='160']").all_text_contents() == ["10k", "20k", "30k", "40k"]
    assert at(0.06) == "mean 0.2 at 3000"
    page.select_option("#axis", "seconds")
    assert at(0.5) == "mean 0.2 at 5"
    page.select_option("#axis", "step")
    assert at(1.0) == "mean 0.3 at 3"
    page.click("nav button:has-text('settings')")
    cost = page.locator("h2:has-text('Cost') + .scroll tr").all_inner_texts()
    assert [row.split("\t") for row in cost[1:]] == [
        ["steps", "3"],
        ["sampled tokens", "40000"],
        ["step, total seconds", "7.5"],
    ]


def test_an_axis_that_no_run_has_recorded(page, tmp_path):
    folder = make_run(tmp_path / "run")
    write_report([folder.path], tmp_path / "report.html", x="tokens")
    page.goto((tmp_path / "report.html").as_uri() + "#curves")
    see(page, "#main", "These runs have no data for this axis. Choose another one.")
    assert page.locator("#axis option[disabled]").all_text_contents() == ["sampled tokens"]
    page.select_option("#axis", "step")
    assert page.locator("svg").count() == 4


def test_zooming_between_two_points_draws_the_line_between_them(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=())
    for step, value in ((1, 0.0), (101, 1.0)):
        folder.log(step, {"reward/mean": value})
    look(page, tmp_path, folder, tab="curves")
    box = page.query_selector("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60)
    page.mouse.up()
    drawn = [float(n) for n in re.findall(r"[\d.]+", page.get_attribute("svg path", "d"))]
    assert drawn == pytest.approx([40, 142, 322, 12], abs=0.1)  # from corner to corner


def test_a_curve_that_differs_only_by_rounding_is_drawn(page, tmp_path):
    folder = make_run(tmp_path / "run")
    for step, value in ((3, 0.3), (4, 0.1 + 0.2), (5, 0.3)):
        folder.log(step, {"rollout/entropy": value})
    look(page, tmp_path, folder, tab="curves")
    assert page.locator("svg[aria-label='entropy'] path").count() == 1


def test_zooming_to_steps_that_a_curve_does_not_have_draws_nothing_of_it(page, tmp_path):
    folder = make_run(tmp_path / "run", steps=range(1, 21))
    folder.log(21, {"rollout/entropy": 1.0})
    look(page, tmp_path, folder, tab="curves")
    assert page.locator("svg circle").count() == 1
    box = page.query_selector("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60)
    page.mouse.up()
    assert page.locator("svg circle").count() == 0
