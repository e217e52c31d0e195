package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/images/converter"
	"github.com/containerd/platforms"
	"github.com/containerd/stargz-snapshotter/nativeconverter/estargz"

	"lazuli/bench/contenders/layout"
)

// convert makes an image as `ctr-remote image convert --estargz --oci` and nerdctl do, with the package's defaults.
func convert(ctx context.Context, source, target string) error {
	work, err := os.MkdirTemp(filepath.Dir(target), "stargz-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	store, err := layout.NewStore(filepath.Join(work, "content"))
	if err != nil {
		return err
	}
	image, err := layout.Load(ctx, store, source)
	if err != nil {
		return err
	}
	made, err := converter.DefaultIndexConvertFunc(estargz.LayerConvertFunc(), true, platforms.All)(ctx, store, image)
	if err != nil {
		return err
	}
	if made == nil {
		return errors.New("nothing was converted")
	}
	return layout.Save(ctx, store, *made, target)
}
