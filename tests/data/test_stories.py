from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np

from longtake.data.stories import GONE, SCENE, SHARED, draw_story, make_stories, scenes, split_stories
from longtake.demo.judge import judge, score
from longtake.generate.run import read_video
from longtake.random import Purpose, uniforms


def test_every_story_shows_its_scenes() -> None:
    for stories in split_stories():
        draws = uniforms(1, 0, Purpose.SAMPLING, 0, np.arange(len(stories)), 6)
        films = [draw_story(story, draw) for story, draw in zip(stories, draws, strict=True)]
        assert {len(film) for film in films} == {SHARED + 3 * SCENE}
        found = score((json.dumps(story), film) for story, film in zip(stories, films, strict=True))
        assert (found.colour, found.direction, found.count) == (1, 1, 3 * len(stories))


def test_scenes_told_in_another_order_are_wrong() -> None:
    story = ("a red circle moves left", "then it moves up", "then it moves right")
    film = draw_story(story, np.full(6, 0.5))
    assert score([(json.dumps(("a red circle moves right", *story[1:])), film)]).direction == 2 / 3
    assert score([(json.dumps(("a blue circle moves left", *story[1:])), film)]).colour == 0
    assert score([(json.dumps((story[0], GONE, story[2])), film)]).colour == 2 / 3


def test_no_frame_of_the_scene_in_which_it_is_gone_shows_the_colour() -> None:
    film = draw_story(("a green square moves up", GONE, "then it moves down"), np.full(6, 0.5))
    hidden = film[SCENE : SHARED + 2 * SCENE]  # the frames that it shares with its neighbours too
    assert judge(hidden).colour is None
    assert judge(film[SCENE - 1 : SCENE]).colour == judge(film[SHARED + 2 * SCENE :]).colour == "green"


def test_stories_held_out_are_in_no_clip(tmp_path: Path) -> None:
    told, unseen, gone, unseen_gone = map(set, split_stories())
    assert not told & unseen
    assert not gone & unseen_gone
    assert [len({story[0] for story in part}) for part in (told, unseen, gone, unseen_gone)] == [72, 72, 72, 32]
    table = make_stories(tmp_path, 3, num_clips=8)
    rows = list(csv.DictReader(table.open()))
    stories = [tuple(json.loads(row["text"])) for row in rows]
    assert [story[1] == GONE for story in stories] == [False, True] * 4
    assert set(stories) <= told | gone
    film = read_video(tmp_path / rows[0]["path"])
    assert [text.split()[-1] for text, _ in scenes(stories[0], film)] == [text.split()[-1] for text in stories[0]]
    assert score([(rows[0]["text"], film)]).both == 1
