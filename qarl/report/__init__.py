"""The report of a run, `report.html`: one file that a browser shows without a network.

`samples` writes and reads the responses that the report shows, `page` reads the run folder and writes the HTML.
"""
