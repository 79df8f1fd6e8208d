"""Watching a run from beside: validations of its checkpoints, alarms over its curves, and a page to look at.

`watching` is the loop, `judging` makes what one checkpoint shows, `alarms` are pure functions of curves, `telling`
takes them to people, `page` is the HTML page.
"""
