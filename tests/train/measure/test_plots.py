# Copyright 2026 The ES-SSM authors. Licensed under the Apache License, Version 2.0.
"""Pictures of budget curves: what is drawn, what is marked, and where axes end."""

from dataclasses import replace

from profiles import HERE, THERE, device, profile

from essm_train.measure.plots import draw_curves, draw_panels, draw_profile
from modeling_essm.budgets.curve import BudgetCurve


def test_a_profile():
    """One curve per batch size over all budgets, times to the right, marks on each curve."""
    found = profile()
    (axes,) = draw_profile(found).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    times, values = (1.0, 1.5, 2.0, 3.0, 5.0), found.quality.values
    assert lines["batch size 1"] == [list(pair) for pair in zip(times, values)]
    assert lines["batch size 4"] == [[2 * ms, value] for ms, value in zip(times, values)]
    assert lines["K = 8: sweet spot"] == [[2.0, 2.03], [4.0, 2.03]]
    assert lines["K = 4: collapse boundary"] == [[1.5, 2.1], [3.0, 2.1]]
    assert [text.get_text() for text in axes.texts] == ["2", "4", "8", "16", "32"] * 2
    assert "decoded token" in axes.get_xlabel() and "lower is better" in axes.get_ylabel()
    (axes,) = draw_profile(profile((0.5, 0.6, 0.7, 0.8, 0.9), True, **{HERE: device(HERE)})).axes
    assert "call over 64 positions" in axes.get_xlabel() and "higher is better" in axes.get_ylabel()
    labels = [line.get_label() for line in draw_profile(profile((2.2, 2.1, 2.03, 2.01, 2.0))).axes[0].get_lines()]
    assert "K = 8: sweet spot" in labels and not any("collapse" in label for label in labels)


def test_a_mark_that_a_device_has_no_time_of_is_not_drawn_there():
    two = device(THERE, (1.0, 1.5, 2.0, 3.0, 5.0))
    two = replace(two, rows=tuple(row for row in two.rows if row.budget in (2, 32)))
    here, there = draw_profile(profile(**{HERE: device(HERE, (1.0, 1.5, 2.0, 3.0, 5.0)), THERE: two})).axes
    assert any("K = 8" in line.get_label() for line in here.get_lines())
    assert not any("K = 8" in line.get_label() for line in there.get_lines()) and here.get_ylim()[0] > 1.9


def test_axes_end_at_what_is_possible():
    """Nobody can use more channels than there are, or be right more often than always; no text needs negative bits."""
    accuracy = BudgetCurve("accuracy", True, (2, 4, 32), (0.2, 0.97, 1.0), errors=(0.2, 0.02, 0.0))
    (axes,) = draw_curves({"one": accuracy}).axes
    assert axes.get_xlim() == (2, 32) and 0 <= axes.get_ylim()[0] < 0.2 and axes.get_ylim()[1] == 1
    bits = BudgetCurve("bits_per_byte", False, (2, 4, 16), (3.0, 0.2, 0.05), errors=(0.1, 0.1, 0.1))
    (axes,) = draw_curves({"one": bits}).axes
    assert axes.get_xlim() == (2, 16) and axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 3
    assert all(not line.get_clip_on() for line in axes.get_lines())  # points at the ends are whole


def test_no_boundary_is_drawn_where_nothing_collapses():
    flat, steep = (BudgetCurve("bits_per_byte", False, (2, 4, 8), (v, 2.1, 2.0), errors=(0.0,) * 3) for v in (2.2, 3.0))
    for curve, markers in ((flat, ["*"]), (steep, ["^", "*"])):
        (axes,) = draw_curves({"one": curve}).axes
        assert [line.get_marker() for line in axes.get_lines()] == ["o", *markers]
        assert ("triangle" in axes.get_xlabel()) == ("^" in markers)


def test_panels_set_the_papers_line_beside_ours():
    """A panel a task, a colour a name; the paper's line is dotted, and on other data in a panel of its own."""
    text, speech = (BudgetCurve("accuracy", True, (2, 4, 8), (0.6, v, 0.8)) for v in (0.65, 0.79))
    baseline = BudgetCurve("accuracy", True, (1,), (0.5,))
    figure = draw_panels(
        {"text": {"ES-SSM": text, "mamba": baseline}, "speech": {"mamba": baseline}}, {"text": {"ES-SSM": speech}}
    )
    first, second = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["text", "speech"]
    lines = {line.get_label(): line for line in first.get_lines()}
    styles = {name: line.get_linestyle() for name, line in lines.items() if name[0] != "_"}
    assert styles == {"ES-SSM": "-", "mamba": "--", "the paper's": ":"}
    assert lines["the paper's"].get_color() == lines["ES-SSM"].get_color() != lines["mamba"].get_color()
    assert lines["the paper's"].get_ydata().tolist() == [0.6, 0.79, 0.8]
    assert second.get_lines()[0].get_color() == lines["mamba"].get_color()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ES-SSM", "mamba", "the paper's"]
    assert legend.get_title().get_text().startswith("spectral budget K (star: sweet spot, triangle")
    ours, theirs = draw_panels({"novels": {"base": text}}, {"the paper, PG19": {"base": speech}}).axes
    assert (ours.get_title(), theirs.get_title()) == ("novels", "the paper, PG19")
    assert [axes.get_lines()[0].get_linestyle() for axes in (ours, theirs)] == ["-", "-"]
