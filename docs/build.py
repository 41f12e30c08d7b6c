"""`make docs`: write the pages of docs/ that are made from the code."""

import sys
from collections.abc import Callable
from pathlib import Path

from architecture_figure import architecture_figure
from costs import all_operations, to_text
from hugging_face_page import hugging_face_page
from performance_page import performance_page, write_figure, write_figures
from programs_page import export_page
from python_page import python_page
from recipes_page import recipes_page
from reference_pages import commands_page, models_page, recipe_page, study_page, tasks_page
from results_page import results_pages, stored_figures
from scaling_page import scaling_page


def pages() -> dict[str, Callable[[], str]]:
    """What makes each generated page, by its place in docs/."""
    return {
        "reference/recipe.md": recipe_page,
        "reference/study.md": study_page,
        "reference/commands.md": commands_page,
        "reference/models.md": models_page,
        "reference/tasks.md": tasks_page,
        "reference/python.md": python_page,
        "recipes.md": recipes_page,
        "performance.md": performance_page,
        "hugging-face.md": hugging_face_page,
        "export.md": export_page,
        "figures/architecture.svg": architecture_figure,
        "scaling.md": scaling_page,
        **results_pages(),
    }


def write(folder: Path, pages: dict[str, Callable[[], str]]) -> list[Path]:
    """Write every page whose text differs from its file; returns these files."""
    changed = []
    for name, make in pages.items():
        path, text = folder / name, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    write(here, {"measurements/operations.json": lambda: to_text(all_operations())})  # which recipes.md reads
    figures = here / "figures"
    drawn = [path for plot in stored_figures() for path in write_figure(figures, plot)]
    for path in [*write(here, pages()), *write_figures(figures), *drawn]:
        sys.stdout.write(f"wrote {path}\n")
