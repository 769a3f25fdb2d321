"""Charts as SVG or PNG (extra `report`), and the HTML page of `ptrain report`."""
