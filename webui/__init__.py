"""The web UI: the same recipes, plans and run folders as the command line, in a browser.

It stands on tunekit's root names only, imports no torch, and keeps nothing of its own: what a page shows is in its URL,
in the browser, or in the workspace on disk. Runs that are started here are processes of their own.

    site.py     the workspace, and what may be reached of it
    words.py    every text, by key and language
    pages.py    which pages there are
    app.py      the pages as one application, once for each language
    server.py   the process that serves it
    work.py     what imports more than this process may, in a process of its own
"""
