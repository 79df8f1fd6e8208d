#!/bin/bash
# Ends all training runs of this user on the nodes of a file: ./kill_process.sh nodes.txt
# Shows them and asks first (--yes: does not ask); runs of others stay, and no sudo is needed.
exec longtake stop "$@" --all
