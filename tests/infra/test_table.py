"""Plain tables are aligned."""

from jaggrl.infra.table import table


def test_numbers_right_text_left() -> None:
    text = table(["reward", "gain"], [["hpsv2", "+0.01"], ["ocr", -1]], title="after")
    assert text.splitlines() == ["after", "reward   gain", "------  -----", "hpsv2   +0.01", "ocr        -1"]


def test_empty_table_is_its_header() -> None:
    assert table(["a", "b"], []) == "a  b\n-  -"
