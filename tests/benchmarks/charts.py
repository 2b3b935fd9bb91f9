def comparison(results, picture):
    import json
    return json.dumps(results, indent=1)
