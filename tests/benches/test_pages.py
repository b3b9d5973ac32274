"""Pictures and pages show the figures of the records."""

import json

import pytest
from PIL import Image

from benches import pages, pictures, tables


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_the_figures_of_its_record(name):
    with Image.open(pictures.IMAGES / f"{name}.png") as drawn:
        assert json.loads(drawn.text[pictures.FIGURES]) == pictures.shown(name)


def test_the_readme_has_the_figures_of_its_picture():
    assert pages.part(pictures.README, "first-token") == pictures.caption(
        pictures.shown("first-token")
    )


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_page_has_the_table_of_a_record(name):
    assert pages.part(tables.page(name), name) == tables.rendered(name)


def test_a_part_is_written_between_its_comments(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one: written by x -->\nold\n<!-- one: end -->\nb\n")
    pages.write_part(page, "one", "new")
    assert pages.part(page, "one") == "new"
    assert page.read_text().startswith("a\n")
    assert page.read_text().endswith("\nb\n")
    with pytest.raises(ValueError, match="no part 'two'"):
        pages.write_part(page, "two", "new")
