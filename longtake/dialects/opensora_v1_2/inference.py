def inference_flags(*a):
    return []


def translate_inference(*a):
    pass
