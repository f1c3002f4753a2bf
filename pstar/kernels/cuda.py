def library():
    return None
