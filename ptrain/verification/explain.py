"""stub"""


def explain(found, evidence, exchange):
    return None
