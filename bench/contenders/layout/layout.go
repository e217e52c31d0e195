// Package layout has what programs around containerd's converters need: a store of their own, and images in OCI layouts.
package layout

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// NewStore makes a store in a directory, with labels.
func NewStore(directory string) (content.Store, error) {
	return local.NewLabeledStore(directory, &labels{known: map[digest.Digest]map[string]string{}})
}

// Load copies the first image of an OCI layout into the store.
func Load(ctx context.Context, store content.Store, layout string) (ocispec.Descriptor, error) {
	text, err := os.ReadFile(filepath.Join(layout, "index.json"))
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	var index ocispec.Index
	if err := json.Unmarshal(text, &index); err != nil {
		return ocispec.Descriptor{}, err
	}
	if len(index.Manifests) == 0 {
		return ocispec.Descriptor{}, fmt.Errorf("%s holds no image", layout)
	}
	image := index.Manifests[0]
	copyBlob := func(ctx context.Context, blob ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		file, err := os.Open(filepath.Join(layout, "blobs", blob.Digest.Algorithm().String(), blob.Digest.Encoded()))
		if err != nil {
			return nil, err
		}
		defer file.Close()
		return nil, content.WriteBlob(ctx, store, blob.Digest.String(), file, blob)
	}
	handler := images.Handlers(images.HandlerFunc(copyBlob), images.ChildrenHandler(store))
	return image, images.Walk(ctx, handler, image)
}

// Save writes an image into a new OCI layout.
func Save(ctx context.Context, store content.Store, image ocispec.Descriptor, layout string) error {
	blobs := filepath.Join(layout, "blobs", "sha256")
	if err := os.MkdirAll(blobs, 0o755); err != nil {
		return err
	}
	copyBlob := func(ctx context.Context, blob ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		reader, err := store.ReaderAt(ctx, blob)
		if err != nil {
			return nil, err
		}
		defer reader.Close()
		file, err := os.Create(filepath.Join(blobs, blob.Digest.Encoded()))
		if err != nil {
			return nil, err
		}
		_, err = io.Copy(file, content.NewReader(reader))
		return nil, errors.Join(err, file.Close())
	}
	handler := images.Handlers(images.HandlerFunc(copyBlob), images.ChildrenHandler(store))
	if err := images.Walk(ctx, handler, image); err != nil {
		return err
	}
	image.Annotations = map[string]string{ocispec.AnnotationRefName: "latest"}
	index := ocispec.Index{Manifests: []ocispec.Descriptor{image}}
	index.SchemaVersion = 2
	text, err := json.Marshal(index)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(layout, "index.json"), text, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(layout, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`), 0o644)
}

// labels keeps what converters note of blobs.
type labels struct {
	mutex sync.Mutex
	known map[digest.Digest]map[string]string
}

func (l *labels) Get(blob digest.Digest) (map[string]string, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return maps.Clone(l.known[blob]), nil
}

func (l *labels) Set(blob digest.Digest, values map[string]string) error {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.known[blob] = maps.Clone(values)
	return nil
}

func (l *labels) Update(blob digest.Digest, values map[string]string) (map[string]string, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.known[blob] == nil {
		l.known[blob] = map[string]string{}
	}
	for key, value := range values {
		if value == "" {
			delete(l.known[blob], key)
		} else {
			l.known[blob][key] = value
		}
	}
	return maps.Clone(l.known[blob]), nil
}
