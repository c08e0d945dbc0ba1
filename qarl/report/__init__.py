"""The report of a run, `report.html`: one file that a browser shows without a network.

`samples` writes and reads the responses that the report shows, `contents` reads the run folder, `page` writes the HTML.
"""
