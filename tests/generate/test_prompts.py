from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.generate.prompts import Prompt, read_prompts


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


def test_a_row_has_options_of_its_own(tmp_path: Path):
    file = write(tmp_path / "t.csv", "text,seed,num_frames,guidance,lora_strength\na cat,7,1,2.5,0\na dog,,,,\n")
    cat, dog = read_prompts(None, file)
    assert dict(cat.options) == {"seed": 7, "num_frames": 1, "guidance": 2.5, "lora_strength": 0.0}
    assert dog.options == ()
    wrong = write(tmp_path / "w.csv", "text,seed,guidance\na cat,x,much\n")
    with pytest.raises(UserError, match="seed in row 1 is 'x', not a whole number; guidance in row 1 is 'much', not a"):
        read_prompts(None, wrong)


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
        ("d.csv", "name,text\n../x,a cat\n", "'../x' in row 1 is not a plain file name"),
        ("n.csv", f"name,text\n{'x' * 300},a cat\n", "in row 1 is not a plain file name"),
        ("s.csv", "text,ref\nraining, sea,a.png\n", "line 2: 3 cells for 2 columns (a cell with a comma needs quotes"),
        ("u.csv", 'text,ref\na cat,\n"a 5"" screen,\na dog,\n', "line 3: the quote that opens cell 1 is never closed"),
        ("v.csv", 'name,text\na,"big\nb,cat\nc,small dog"\n', "line 2: a quoted cell encloses the row 'b,cat'"),
        ("w.csv", 'text,ref\n"a \\"big\\" cat",\n', "line 2: cell 1 has a"),
        ("x.csv", "text;ref\na cat;\n", "line 1 has semicolons between its cells"),
        ("y.csv", "sep=,\ntext,ref\na cat,\n", "line 1 is 'sep=,'"),
        ("t.csv", "text,ref,text\na,b.png,c\n", "has 2 columns text; keep one of them"),
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
    with pytest.raises(UserError, match=r"latin\.txt'.*line 2 is not UTF-8"):
        read_prompts(None, write(tmp_path / "latin.txt", "a\nété", "latin-1"))
    with pytest.raises(UserError, match="NUL bytes"):
        read_prompts(None, write(tmp_path / "unmarked.txt", "a cat", "utf-16-le"))
    for name, text in (("wide.txt", "un été"), ("wide.csv", "text\nun été\n")):
        assert [p.text for p in read_prompts(None, write(tmp_path / name, text, "utf-16"))] == ["un été"]
    with pytest.raises(UserError, match="Is a directory"):
        read_prompts(None, str(tmp_path))


def test_references_are_seen_from_the_table_or_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "a.png").touch()
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path / "lists" / "t.csv", "text,ref\na cat,a.png; b.png ;\na dog,\n")
    assert [p.refs for p in read_prompts(None, file)] == [(str(tmp_path / "lists" / "a.png"), "b.png"), ()]
    assert [p.refs for p in read_prompts(None, file, ref="c.png;d.png")][1] == ("c.png", "d.png")
    assert read_prompts("a cat", None, ref="c.png")[0].refs == ("c.png",)


def test_spaces_around_the_names_of_columns_do_not_count(tmp_path: Path):
    (prompt,) = read_prompts(None, write(tmp_path / "t.csv", "name, text , ref\ncat, a cat , a.png\n"))
    assert (prompt.name, prompt.text, prompt.refs) == ("cat", "a cat", ("a.png",))


def test_a_slice_keeps_rows_and_names(tmp_path: Path):
    file = write(tmp_path / "t.txt", "a\nb\nc\nd\n")
    assert [(p.text, p.name, p.row) for p in read_prompts(None, file, 2, start=1)] == [
        ("b", "t_0001", 1),
        ("c", "t_0002", 2),
    ]
    assert [p.text for p in read_prompts(None, file, start=1, end=2)] == ["b"]
    with pytest.raises(UserError, match="start_index = 4: leaves none of 4 prompts"):
        read_prompts(None, file, start=4)


def test_every_fault_of_a_table_is_named_at_once(tmp_path: Path):
    file = write(tmp_path / "t.csv", "name,text\nx,\n../y,b\nz,c\n.w,\n")
    with pytest.raises(UserError) as caught:
        read_prompts(None, file)
    said = str(caught.value)
    assert [said.count(part) for part in ("row 1", "row 2", "row 3", "text is empty in row 4", "'.w' in row 4")] == [
        1,
        1,
        0,
        1,
        1,
    ]
    many = write(tmp_path / "m.csv", "name,text\n" + "x,\n" * 30)
    with pytest.raises(UserError, match="text is empty in row 20; and 10 more; mend"):
        read_prompts(None, many)


def test_no_prompt_an_empty_one_and_two_sources_are_refused():
    with pytest.raises(UserError, match="nothing to generate; write --prompt"):
        read_prompts(None, None)
    with pytest.raises(UserError, match="a prompt is empty"):
        read_prompts(["a cat", " "], None)
    with pytest.raises(UserError, match="keep one of the two"):
        read_prompts("a cat", "x.txt")


GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "ttt_video" / "prompts.json").read_text())
MARKS = "<end_scene>", "<start_scene>"


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_storyboard_gives_each_segment_its_text_with_marks_of_scenes_as_published(tmp_path: Path, suffix: str):
    videos = [story["scenes"] for story in GOLDEN["prompts"]]
    text = json.dumps(videos) if suffix == "json" else "".join(f"{json.dumps(video)}\n" for video in videos)
    found = read_prompts(None, write(tmp_path / f"story.{suffix}", text), scene_marks=MARKS)
    assert [json.loads(prompt.text) for prompt in found] == [story["texts"] for story in GOLDEN["prompts"]]
    negatives = [[part or "" for part in story["negative"]] for story in GOLDEN["prompts"]]
    assert [prompt.negative and json.loads(prompt.negative) for prompt in found] == [
        parts if any(parts) else None for parts in negatives
    ]
    assert [prompt.name for prompt in found] == ["story_0000", "story_0001", "story_0002"]


@pytest.mark.parametrize(
    ("text", "marks", "said"),
    [
        ("[[{}]]", MARKS, "scene 1 has no text in row 1"),
        ('[[], [{"text": "a", "neg": ""}]]', MARKS, "no list of scenes in row 1; scene 1 has 'neg', which is none of"),
        (
            '[[{"text": "a", "requires_scene_transition": 1}]]',
            MARKS,
            "requires_scene_transition of scene 1 is 1 in row",
        ),
        ('{"text": "a"}', MARKS, "is no list of videos"),
        ("[[", MARKS, "it is not JSON"),
        ('[[{"text": "a"}]]', None, "this model has one text for a video"),
    ],
)
def test_a_storyboard_that_is_none_is_refused(tmp_path: Path, text: str, marks: tuple[str, str] | None, said: str):
    with pytest.raises(UserError, match=re.escape(said)):
        read_prompts(None, write(tmp_path / "story.json", text), scene_marks=marks)


def test_text_file_in_musubi_tuners_notation_is_read(tmp_path: Path):
    lines = [
        "# a comment",
        "a cat --w 832 --h 480 --f 81 --d 42 --s 20 --l 6.5 --n blurry, low quality --i cat.png",
        "  # another",
        "a dog -- or two, --quickly, run",
        "an owl --n",
    ]
    prompts = read_prompts(None, write(tmp_path / "list.txt", "\n".join(lines)))
    options = (("num_frames", 81), ("seed", 42), ("num_steps", 20), ("guidance", 6.5), ("resolution", "480x832"))
    cat, dog, owl = prompts
    assert (cat.text, cat.negative, cat.refs, cat.name) == ("a cat", "blurry, low quality", ("cat.png",), "list_0000")
    assert sorted(cat.options) == sorted(options)
    assert (dog.text, dog.options, dog.name) == ("a dog -- or two, --quickly, run", (), "list_0001")
    assert (owl.text, owl.negative) == ("an owl", None)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("a cat --w 832", "--w 832"),
        ("a cat --w 832 --h tall", "--h tall"),
        ("a cat --d x", "--d x"),
        ("a cat --s 2.5", "--s 2.5"),
        ("a cat --fs 3", "--fs"),
        ("a cat --zz 3", "--zz"),
        ("a cat --guidance 3", "--guidance"),
        ("a cat --seed=3", "--seed=3"),
        ("a cat --i", "--i"),
        ("--w 832 --h 480", "no prompt"),
    ],
)
def test_text_file_option_that_cannot_be_read_is_refused_with_its_line(line: str, named: str, tmp_path: Path):
    with pytest.raises(UserError, match=re.escape("line 2: ")) as error:
        read_prompts(None, write(tmp_path / "list.txt", f"# comment\n{line}\n"))
    assert named in str(error.value)


@pytest.mark.parametrize("text", ["a cat --w 832 --h 480", "a cat --n blurry", "a cat --num-frames=33"])
def test_options_behind_a_prompt_on_the_command_line_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="options behind a prompt"):
        read_prompts(["a dog -- and a bird", text], None)
