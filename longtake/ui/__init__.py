"""The page in a browser (`longtake ui`): generate, runs, data and adapters, over what the command line does.

`server` opens it, `gate` and `roots` say who may see what, `queue` runs commands one after another; each tab
has a file.
"""
