from __future__ import annotations

from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.generate import Prompt, read_prompts


def write(path: Path, text: str, encoding: str = "utf-8") -> str:
    path.write_bytes(text.encode(encoding))
    return str(path)


def test_one_prompt_or_a_list_of_them_comes_from_the_command_line():
    assert read_prompts("a cat", None) == [Prompt("a cat", "prompt_0000")]
    assert [p.text for p in read_prompts(["a cat", "a dog"], None)] == ["a cat", "a dog"]
    assert read_prompts(["a cat", "a dog", "an owl"], None, limit=2)[-1] == Prompt("a dog", "prompt_0001")


def test_a_text_file_has_one_prompt_a_line_and_blank_lines_do_not_count(tmp_path: Path):
    file = write(tmp_path / "list.txt", '\ufeffa cat, "asleep"\r\n\r\n  un été\u2028chaud  \n')
    assert read_prompts(None, file) == [
        Prompt('a cat, "asleep"', "list_0000"),
        Prompt("un été\u2028chaud", "list_0001"),
    ]


def test_a_table_gives_texts_names_and_negative_prompts(tmp_path: Path):
    file = write(tmp_path / "t.csv", 'name,text,neg\nfirst,"a cat,\nasleep",blurry\n,a dog,\n')
    assert read_prompts(None, file) == [
        Prompt("a cat,\nasleep", "first", "blurry"),
        Prompt("a dog", "t_0001", None),
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("e.txt", "\n \n", "no prompt is in it"),
        ("e.csv", "", "no prompt is in it"),
        ("h.csv", "text\n", "no prompt is in it"),
        (
            "c.csv",
            "caption,name\na cat,x\n",
            "its columns are caption, name; the prompts must be in a column named text",
        ),
        ("m.csv", "name,text\nx\n", "text is empty in row 1"),
        ("d.csv", "name,text\n../x,a cat\n", "'../x' in row 1 is no plain file name"),
        ("n.csv", f"name,text\n{'x' * 300},a cat\n", "in row 1 is no plain file name"),
        ("q.csv", 'text\n"' + "a" * 200_000 + '"\n', "is no CSV"),
    ],
)
def test_a_file_without_usable_prompts_is_refused_in_one_sentence(tmp_path: Path, name: str, text: str, said: str):
    with pytest.raises(UserError) as caught:
        read_prompts(None, write(tmp_path / name, text))
    assert said in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_not_text_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"gone\.txt'.*No such file"):
        read_prompts(None, str(tmp_path / "gone.txt"))
    with pytest.raises(UserError, match=r"latin\.txt'.*not UTF-8"):
        read_prompts(None, write(tmp_path / "latin.txt", "été", "latin-1"))
    with pytest.raises(UserError, match="Is a directory"):
        read_prompts(None, str(tmp_path))


def test_no_prompt_an_empty_one_and_two_sources_are_refused():
    with pytest.raises(UserError, match="nothing to generate; write --prompt"):
        read_prompts(None, None)
    with pytest.raises(UserError, match="a prompt is empty"):
        read_prompts(["a cat", " "], None)
    with pytest.raises(UserError, match="keep one of the two"):
        read_prompts("a cat", "x.txt")
