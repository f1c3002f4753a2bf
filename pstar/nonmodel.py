def watch(device, holds):
    raise NotImplementedError
