{{/* Refuse values of pods that Kubernetes would refuse, or that the chart would not use. */}}

{{- define "moiety.validatePods" -}}
{{- include "moiety.validateLabels" (list "commonLabels" .Values.commonLabels) -}}
{{- $parts := dict "gateway" .Values.gateway "jobs" .Values.jobs -}}
{{- if .Values.dashboard.enabled }}{{ $_ := set $parts "dashboard" .Values.dashboard }}{{ end -}}
{{- if .Values.traces.enabled }}{{ $_ := set $parts "traces" .Values.traces }}{{ end -}}
{{- if .Values.inferencePool.enabled }}{{ $_ := set $parts "inferencePool.picker" .Values.inferencePool.picker }}{{ end -}}
{{- if .Values.database.bundled.enabled }}{{ $_ := set $parts "database.bundled" .Values.database.bundled }}{{ end -}}
{{- range $path, $values := $parts -}}
{{- include "moiety.validatePart" (list $path (include "moiety.part" (list $ $values) | fromJson)) -}}
{{- end -}}
{{- range .Values.engines -}}
{{- $pool := include "moiety.wholePool" (list $ .) | fromJson -}}
{{- include "moiety.validatePart" (list (printf "engines (pool %s)" .name) $pool) -}}
{{- end -}}
{{- end -}}

{{/* Of (list path part). */}}
{{- define "moiety.validatePart" -}}
{{- $path := index . 0 -}}
{{- $part := index . 1 -}}
{{- include "moiety.validateResources" (list $path $part.resources) -}}
{{- include "moiety.validateLabels" (list (printf "%s.podLabels" $path) $part.podLabels) -}}
{{- $chart := list "settings" "data" "objects" "scratch" "curve" "state" "shared-memory" "model" "hub" "login" "declared" "socket" "tls" -}}
{{- $volumes := list -}}
{{- range $part.extraVolumes -}}
{{- if or (has .name $chart) (has .name $volumes) (hasPrefix "tokenizer-" .name) (hasPrefix "engine-key-" .name) -}}
{{- fail (printf "%s.extraVolumes has a volume %s, and the pod already has a volume with this name: give it another name" $path .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- range $part.extraVolumeMounts -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "%s.extraVolumeMounts mounts the volume %s, which is not in extraVolumes: add it there" $path .name) -}}
{{- end -}}
{{- end -}}
{{- $containers := list "gateway" "dashboard" "traces" "postgres" "engine" "migrate" "check" "secrets" "owner" "declared" "endpoint-picker" -}}
{{- range $part.sidecars -}}
{{- if or (has .name $containers) (hasPrefix "tokenizer-" .name) -}}
{{- fail (printf "%s.sidecars has a container %s, and the pod already has a container with this name: give it another name" $path .name) -}}
{{- end -}}
{{- $containers = append $containers .name -}}
{{- end -}}
{{- include "moiety.validateStrategy" (list $path ($part.updateStrategy | default dict)) -}}
{{- end -}}

{{/* Of (list path labels): none is a label that selects pods, or that the chart sets. */}}
{{- define "moiety.validateLabels" -}}
{{- $path := index . 0 -}}
{{- range $name, $value := index . 1 -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|version|managed-by)|helm\\.sh/chart|moiety\\.dev/.*)$" $name -}}
{{- fail (printf "%s has the label %s, which the chart sets itself: give it another name" $path $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of (list path strategy). */}}
{{- define "moiety.validateStrategy" -}}
{{- $path := index . 0 -}}
{{- $strategy := index . 1 -}}
{{- if and $strategy.rollingUpdate (has $strategy.type (list "Recreate" "OnDelete")) -}}
{{- fail (printf "%s.updateStrategy has the type %s, which has no rollingUpdate: leave rollingUpdate out, or set type=RollingUpdate" $path $strategy.type) -}}
{{- end -}}
{{- end -}}

{{/* Of (list path resources): every amount is a quantity, and no request is greater than its limit. */}}
{{- define "moiety.validateResources" -}}
{{- $path := index . 0 -}}
{{- $resources := index . 1 -}}
{{- range $kind, $amounts := $resources -}}
{{- range $name, $amount := $amounts -}}
{{- $_ := include "moiety.amount" (list (printf "%s.resources.%s.%s" $path $kind $name) $amount) -}}
{{- end -}}
{{- end -}}
{{- range $name, $request := $resources.requests | default dict -}}
{{- $limit := get ($resources.limits | default dict) $name -}}
{{- if and $limit (gt (include "moiety.amount" (list "" $request) | float64) (include "moiety.amount" (list "" $limit) | float64)) -}}
{{- fail (printf "%s.resources.requests.%s (%v) is greater than the limit (%v): raise resources.limits.%s or lower the request" $path $name $request $limit $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Of (list path quantity): the quantity as a number. */}}
{{- define "moiety.amount" -}}
{{- $text := index . 1 | toString -}}
{{- if not (regexMatch "^[0-9]+(\\.[0-9]+)?(e[+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$" $text) -}}
{{- fail (printf "%s is %s, which is not a quantity of Kubernetes: write a number with an optional suffix, such as 500m, 2, 512Mi or 64Gi" (index . 0) $text) -}}
{{- end -}}
{{- $suffix := regexFind "[A-Za-z]+$" $text -}}
{{- $decimal := dict "" 1 "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $binary := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- mulf (trimSuffix $suffix $text) (get (merge $decimal $binary) $suffix) -}}
{{- end -}}

{{/* Sizes of volumes. */}}
{{- define "moiety.validateSizes" -}}
{{- $sizes := dict "database.bundled.size" .Values.database.bundled.size "objectStore.volume.size" .Values.objectStore.volume.size -}}
{{- range .Values.engines -}}
{{- $pool := include "moiety.wholePool" (list $ .) | fromJson -}}
{{- $path := printf "engines (pool %s)" .name -}}
{{- $own := dict "stateSize" $pool.stateSize "model.hubCacheSize" $pool.model.hubCacheSize "sharedMemory" $pool.sharedMemory -}}
{{- range $name, $size := $own }}{{ $_ := set $sizes (printf "%s.%s" $path $name) $size }}{{ end -}}
{{- end -}}
{{- range $path, $size := $sizes -}}
{{- if $size }}{{ $_ := include "moiety.amount" (list $path $size) }}{{ end -}}
{{- end -}}
{{- end -}}
