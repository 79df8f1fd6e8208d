import os

if os.environ.get("LONGTAKE_MARGINS"):  # before a test takes the functions that it compares with
    from tests import margins

    margins.install()
