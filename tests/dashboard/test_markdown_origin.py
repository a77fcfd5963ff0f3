"""No text of others reaches Streamlit's Markdown or HTML unescaped, in whatever way it is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.dashboard.markdown_origin import check_sources, read_sources

import moiety_dashboard
from moiety_dashboard.cli import server_options

PACKAGE = Path(moiety_dashboard.__file__).parent
START = "import html\nimport streamlit as st\nfrom moiety_dashboard.escaping import as_text\n"


def findings(source: str) -> list[str]:
    return check_sources({"moiety_dashboard.page": START + source})


def test_all_that_the_dashboard_renders_is_its_own_text_or_was_escaped() -> None:
    sources = read_sources(PACKAGE)
    assert len(sources) > 30
    assert check_sources(sources) == []


@pytest.mark.parametrize(
    "source",
    [
        "def draw(row): st.markdown(row['name'])",
        "def draw(row): st.caption(body=row['name'])",
        "def draw(row): st.metric('Name', row['name'])",
        "def draw(row): st.metric('Name', 1, help=row['name'])",
        "def draw(row): st.button(f\"Delete {row['name']}\")",
        "def draw(row): st.button('Delete %s' % row['name'])",
        "def draw(row): st.button('Delete {}'.format(row['name']))",
        "def draw(row): st.error('No ' + row['name'])",
        "def draw(row): st.toast(' '.join([row['name']]))",
        "def draw(row): st.badge(f\"{row['name']:>10}\")",
        "def draw(row):\n name = 'none'\n if row:\n  name = row['name']\n st.info(name)",
        "def draw(row):\n name = 'a'\n name += row['name']\n st.info(name)",
        "def draw(rows):\n for row in rows:\n  st.info(row)",
        "def draw(row):\n left, right = st.columns(2)\n left.warning(row['name'])",
        "def draw(rows): st.segmented_control('Class', rows)",
        "def draw(rows): st.radio('Class', ['a'], captions=rows)",
        "def draw(rows): st.tabs(rows)",
        "def draw(row): st.column_config.TextColumn(row['name'])",
        "def draw(row):\n column = st.column_config\n column.NumberColumn('n', help=row['name'])",
        "def draw(row): st.column_config.LinkColumn('Link')",
        "def draw(row): st.write(row['name'])",
        "def draw(row): st.image(row['name'])",
        "def draw(row):\n try: pass\n except ValueError as exc: st.error(exc)",
        "def draw(row): st.exception(ValueError(row['name']))",
        "def draw(row): st.markdown(as_text('a'), unsafe_allow_html=True)",
        "def draw(row): st.html(html.escape(row['name']), unsafe_allow_javascript=True)",
        "def draw(row):\n SCRIPT = row['name']\n st.html(SCRIPT, unsafe_allow_javascript=True)",
        "NAME = 'a'\nSCRIPT = f'<script>{NAME}</script>'\ndef draw(): st.html(SCRIPT, unsafe_allow_javascript=True)",
        "def draw(row): st.html(as_text(row['name']))",  # what Markdown reads as text may be a tag
        "def draw(row): st.markdown(html.escape(row['name']))",
        "def draw(row): st.markdown(**row)",
        "def draw(row): st.markdown(*row)",
        "def draw(row):\n show = st.markdown\n show(row['name'])",
        "def draw(row): getattr(st, 'mark' + 'down')(row['name'])",
        "from streamlit import markdown\ndef draw(row): markdown(row['name'])",
        "def show(text): st.markdown(text)\ndef draw(row): show(row['name'])",
        "def show(text): st.markdown(text)\ndef draw(row): show(text=row['name'])",
        "def show(text): st.markdown(text)\ndef draw(row): show(**row)",
        "def show(text): tell(text)\ndef tell(text): st.markdown(text)\ndef draw(row): show(row['name'])",
        "def label(row): return row['name']\ndef draw(row): st.markdown(label(row))",
        "def label(row): return f'{row}'\ndef draw(row): st.markdown(label(row['name']))",
        "@st.dialog('Sure?')\ndef ask(what): st.markdown(what)\ndef draw(row): ask(row['name'])",
        "def draw(rows):\n names = ['a']\n names.append(rows[0])\n st.markdown(names[0])",
        "def draw(rows): st.markdown(', '.join(row for row in rows))",
        "from others import as_text\ndef draw(row): st.markdown(as_text(row['name']))",
    ],
)
def test_text_of_others_is_found(source: str) -> None:
    assert findings(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "def draw(row): st.markdown(f\"**{as_text(row['name'])}** of {row['n']:,d}\")",
        "def draw(row): st.html(f\"<b>{html.escape(row['name'])}</b>\")",
        "def draw(row): st.code(row['name'], language=None)\ndef tell(row): st.text(row['name'])",
        "def draw(rows): st.segmented_control('Class', rows, format_func=as_text)",
        "def draw(rows): st.selectbox('Class', rows)",
        "KINDS = {'a': 'an a'}\ndef draw(kind): st.markdown(KINDS[kind])",
        "def show(text): st.markdown(text)\ndef draw(row): show(as_text(row['name']))",
        "def draw(rows): st.caption(f'{len(rows)} of them')",
        "def label(row): return as_text(row['name'])\ndef draw(row): st.markdown(label(row))",
        "SCRIPT = '<script>1</script>'\ndef draw(): st.html(SCRIPT, unsafe_allow_javascript=True)",
    ],
)
def test_literals_numbers_and_escaped_text_are_not(source: str) -> None:
    assert findings(source) == []


def test_streamlits_own_export_that_escapes_no_formulas_is_off() -> None:
    assert server_options("127.0.0.1", 8501)["client_disableDataExport"] is True
