"""What users see, recorded: plans, losses, help texts, public names, the shapes of files, and messages.

These tests show that a change leaves them alone, such as a move of modules. A change that means to alter them records
them anew, and the difference is reviewed with it:

    python -m tests.photographs.record            # everything, slow tests included
    python -m tests.photographs.record help names # some kinds

The recorded files lie beside the tests. They hold no paths, times, names of hosts or versions of libraries.
"""
